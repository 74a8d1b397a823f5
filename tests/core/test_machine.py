"""Any life of any core: whatever comes in, in whatever order, no law breaks and no byte is ever the wrong one."""

from collections.abc import Sequence

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvarve.core.lease import Lease
from kvarve.core.policies import Patience, WritePolicy
from kvarve.model import PoolSpec, Tier
from kvarve.testing.world import ATTENTION, INDEX, PATIENCES, STATE, WINDOW, World, config

POOLS = st.sampled_from(
    [
        (ATTENTION,),
        (WINDOW,),
        (STATE,),
        (ATTENTION, STATE),
        (STATE, ATTENTION),
        (ATTENTION, WINDOW),
        (ATTENTION, INDEX),
        (WINDOW, STATE),
        (ATTENTION, INDEX, STATE),
        (STATE, INDEX, WINDOW, ATTENTION),
    ]
)
PICK = st.integers(0, 20)
TOKENS = st.lists(st.integers(0, 1), max_size=6)
BITS = st.one_of(st.just(0), st.just(0), st.integers(0, 2**12 - 1), st.just(-1))


class Life(RuleBasedStateMachine):
    """`World` audits the core and reads every byte after each call, so the rules need no invariant of their own."""

    world: World

    @initialize(
        pools=POOLS,
        device=st.lists(st.integers(1, 14), min_size=4, max_size=4),
        host=st.one_of(st.just([0] * 4), st.lists(st.integers(0, 18), min_size=4, max_size=4)),
        storage=st.booleans(),
        write=st.sampled_from(WritePolicy),
        sizes=st.tuples(st.sampled_from([1, 2]), st.sampled_from([1, 3, 64]), st.sampled_from([2, 50])),
        every=st.sampled_from([0, 0, 2, 4]),
        uses=st.integers(1, 3),
    )
    def begin(
        self,
        pools: tuple[PoolSpec, ...],
        device: list[int],
        host: list[int],
        storage: bool,
        write: WritePolicy,
        sizes: tuple[int, int, int],
        every: int,
        uses: int,
    ) -> None:
        grid, batch, backup = sizes
        self.world = World(
            config=config(
                *pools,
                device=device[: len(pools)],
                host=host[: len(pools)],
                grid=grid,
                storage=storage,
                write_policy=write.value,
                selective_uses=uses,
                snapshot_every=every,
                batch_pages=batch,
                backup_pages=backup,
            )
        )

    def ready(self) -> list[Lease]:
        return [lease for lease in self.world.leases if lease.ready]

    @rule(
        zeros=st.sampled_from([0, 4, 8, 14, 20]),
        rest=TOKENS,
        salt=st.sampled_from("aaab"),
        patience=st.sampled_from(PATIENCES),
        read=st.sampled_from([True, True, True, False]),
    )
    def open(self, zeros: int, rest: list[int], salt: str, patience: Patience, read: bool) -> None:
        self.world.open([0] * zeros + rest, salt, patience, read)

    @rule(zeros=st.sampled_from([4, 8, 14]), rest=TOKENS, salt=st.sampled_from("aab"), parts=st.integers(1, 3))
    def whole_request(self, zeros: int, rest: list[int], salt: str, parts: int) -> None:
        self.world.request([0] * zeros + rest, salt, chunks=parts, rest=False)

    @precondition(lambda self: self.world.leases)
    @rule(pick=PICK)
    def claim(self, pick: int) -> None:
        self.world.claim(self.world.leases[pick % len(self.world.leases)])

    @precondition(lambda self: self.ready())
    @rule(pick=PICK, more=st.integers(1, 8))
    def grow(self, pick: int, more: int) -> None:
        lease, grid = self.ready()[pick % len(self.ready())], self.world.core.grid
        upto = min(self.world.core.keepable(lease), lease.grown + grid * more) // grid * grid
        if upto > lease.grown:
            self.world.grow(lease, upto)

    @precondition(lambda self: self.ready())
    @rule(pick=PICK, less=st.integers(0, 4))
    def publish(self, pick: int, less: int) -> None:
        lease, grid = self.ready()[pick % len(self.ready())], self.world.core.grid
        self.world.publish(lease, max(lease.done, (lease.grown - less) // grid * grid))

    @precondition(lambda self: self.world.leases)
    @rule(pick=PICK)
    def close(self, pick: int) -> None:
        self.world.close(self.world.leases[pick % len(self.world.leases)])

    @rule(tiers=st.sampled_from([(Tier.DEVICE,), (Tier.HOST,), (Tier.DEVICE, Tier.HOST)]))
    def flush(self, tiers: Sequence[Tier]) -> None:
        self.world.flush(*tiers)

    @rule(later=st.sampled_from([0.0, 0.5, 2.0]))
    def time_passes(self, later: float) -> None:
        self.world.step(later_s=later)

    @precondition(lambda self: self.world.flying)
    @rule(picks=st.lists(st.tuples(PICK, BITS, BITS), min_size=1, max_size=4))
    def copies_end(self, picks: list[tuple[int, int, int]]) -> None:
        ended = []
        for pick, lost, rotten in picks:
            if self.world.flying:
                ended.append(self.world.end([*self.world.flying][pick % len(self.world.flying)], lost, rotten))
        self.world.step(ended)

    @precondition(lambda self: self.world.flying)
    @rule()
    def everything_arrives(self) -> None:
        self.world.step([self.world.end(op) for op in [*self.world.flying]])

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
