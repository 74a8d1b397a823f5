"""One vLLM engine in a process of its own, for tests; see `engine_commands`.

    python vllm_process.py '{"model": FOLDER, "dtype": ..., "chunk": ..., "seam": ..., "extra": {...}, ...}'

Behind either seam a recorder takes a fingerprint of each page's bytes when it is saved, and compares them when the page
has been loaded, in this or another process that shares the file of fingerprints. The storage fails as told.
"""

import random
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

from engine_commands import OURS, SETTINGS, Engine, sampling, serve
from prints import Prints
from vllm_recorder import Recorder, shifted

from kvarve.pages.pools import Tier

SMALL = 12  # tokens of an answer
SETTLED, SETTLED_S = 5000, 10.0  # steps, and seconds, after which a copy counts as hanging


class Watched(Engine):
    """An engine without kvarve ("plain"), with kvarve's connector, or with kvarve's tier under vLLM's host memory."""

    def __init__(self) -> None:
        self.prints = Prints(Path(SETTINGS["prints"]))
        if SETTINGS["seam"] != "plain":
            self._make_faulty()
        more: dict[str, Any] = {"max_num_batched_tokens": SETTINGS["chunk"]}
        if SETTINGS.get("events"):
            from vllm.config import KVEventsConfig

            more["kv_events_config"] = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        super().__init__(
            SETTINGS["model"],
            SETTINGS["dtype"],
            SETTINGS["seam"],
            SETTINGS.get("extra", {}),
            more | SETTINGS.get("more", {}),
        )
        self.events: list[Any] = []
        self.shift = -0.25  # of weights, when they were last changed
        self._open()
        if SETTINGS.get("events"):
            publisher = self.core.scheduler.kv_event_publisher
            publisher.publish = lambda batch: self.events.extend(batch.events)

    def _open(self) -> None:
        if self.seam in OURS:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            self.worker = get_kv_transfer_group()
            if self.seam == "several":
                self.worker = self.worker.sub_connectors[0]
            self.scheduler = self.connector()
            Recorder(self.worker, self.prints)
            self.guard = self.worker.worker.attached.storage
        elif self.seam == "tiering":
            import tier_worker

            (self.tier,) = tier_worker.TIERS
            self.tier.prints = self.prints
            self.guard = self.tier._storage

    def _make_faulty(self) -> None:
        """kvarve's storage fails on demand."""
        from kvarve.testing import FaultyStorage
        from kvarve.transfer import storage_connection

        real = storage_connection.open_storage

        def opened(*urls: Any, **more: Any) -> Any:
            self.storage = FaultyStorage(real(*urls, **more))
            return self.storage

        storage_connection.open_storage = opened  # type: ignore[assignment]

    # --- commands

    def ask(
        self,
        prompts: list[list[int]],
        tokens: int = SMALL,
        read: bool = True,
        adapter: dict[str, Any] | None = None,
        drain: bool = True,
    ) -> list[dict[str, Any]]:
        """`read`: whether a cache may be hit. `adapter`: what vLLM's LoRARequest takes."""
        given: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        how = sampling(tokens, logprobs=1, skip_reading_prefix_cache=not read)
        outputs = self.llm.generate(given, how, use_tqdm=False, lora_request=self._lora(adapter))
        if drain:
            self.drain()
        return [self._told(output) for output in outputs]

    def ask_so(self, prompt: list[int], how: dict[str, Any], **more: Any) -> dict[str, Any]:
        """A request with these sampling parameters, and `more` beside its tokens."""
        given: Any = [{"prompt_token_ids": prompt} | more]
        (output,) = self.llm.generate(given, sampling(SMALL, logprobs=1, **how), use_tqdm=False)
        self.drain()
        return self._told(output)

    def beams(self, prompt: list[int]) -> list[Any]:
        from vllm.sampling_params import BeamSearchParams

        (output,) = self.llm.beam_search([{"prompt_token_ids": prompt}], BeamSearchParams(beam_width=2, max_tokens=6))
        self.drain()
        return [[beam.tokens, beam.cum_logprob] for beam in output.sequences]

    def embedding(self, prompt: list[int]) -> list[Any]:
        """And how many of its tokens were cached."""
        (output,) = self.llm.embed([{"prompt_token_ids": prompt}], use_tqdm=False)
        self.drain()
        return [output.outputs.embedding, output.num_cached_tokens]

    def picture(self, prompt: str, colour: str) -> dict[str, Any]:
        """An answer to a prompt with a picture of one colour."""
        from PIL import Image

        given: Any = {"prompt": prompt, "multi_modal_data": {"image": Image.new("RGB", (56, 56), colour)}}
        (output,) = self.llm.generate([given], sampling(SMALL, logprobs=1), use_tqdm=False)
        self.drain()
        return self._told(output)

    def one_of(self, prompt: list[int], choices: list[str]) -> list[Any]:
        """An answer that is one of these, and how many of the prompt's tokens were cached."""
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        how = SamplingParams(temperature=0, max_tokens=8, structured_outputs=StructuredOutputsParams(choice=choices))
        (output,) = self.llm.generate([{"prompt_token_ids": prompt}], how, use_tqdm=False)
        self.drain()
        return [output.outputs[0].text, output.num_cached_tokens]

    def load(self, adapter: dict[str, Any]) -> None:
        assert self.llm.llm_engine.add_lora(self._lora(adapter))

    def unload(self, number: int) -> None:
        assert self.llm.llm_engine.remove_lora(number)

    def loaded(self) -> list[int]:
        return [*self.llm.llm_engine.list_loras()]

    def overwrite(self, prompt: list[int], adapter: dict[str, Any], seed: int) -> None:
        """A request in the midst of which the files of its adapter are overwritten."""
        from adapters import written

        self._to_the_midst(prompt, self._lora(adapter))
        written(Path(adapter["lora_path"]), seed)
        self._to_the_end()

    def _lora(self, adapter: dict[str, Any] | None) -> Any:
        from vllm.lora.request import LoRARequest

        return None if adapter is None else LoRARequest(**adapter)

    def at_once(self, asked: list[tuple[list[int], dict[str, Any]]], tokens: int) -> list[dict[str, Any]]:
        """Requests with adapters. The first one runs, and the files of its adapter are gone, when all others come."""
        (prompt, adapter), *others = asked
        self._add("0", prompt, adapter, tokens)
        while not self.core.scheduler.running:
            self.llm.llm_engine.step()
        shutil.rmtree(adapter["lora_path"])
        for number, (prompt, adapter) in enumerate(others, 1):
            self._add(str(number), prompt, adapter, 2)
        found: dict[str, Any] = {}
        while len(found) < len(asked):
            for output in self.llm.llm_engine.step():
                if output.finished:
                    found[output.request_id] = self._told(output)
        self.drain()
        return [found[str(number)] for number in range(len(asked))]

    def change_before_the_first_step(self, prompt: list[int], adapter: dict[str, Any], how: str) -> dict[str, Any]:
        """A request whose pages have been loaded, or are on their way ("late"), when weights change: its adapter's by a
        load or after an unload, or the model's. Until then their copies hang."""
        scheduler, hangs = self.core.scheduler, how.startswith("late ")
        real, held = self.worker.worker.report, list[Any]()

        def late() -> Any:  # as copies of a GPU end
            found = real()
            held.extend(found.events)
            return found._replace(events=[])

        def ended() -> Any:
            found, events = real(), held.copy()
            held.clear()
            return found._replace(events=events + found.events)

        self.worker.worker.report = late if hangs else real
        self._add("waits", prompt, adapter)
        while not (scheduler.finished_recving_kv_req_ids or (hangs and self.scheduler.planner._loads)):
            self.llm.llm_engine.step()
        self.worker.worker.report = ended
        match how.removeprefix("late "):
            case "load":
                self.load(adapter | {"load_inplace": True})
            case "unload":
                self.unload(adapter["lora_int_id"])
            case "call":
                self.llm.collective_rpc(partial(shifted, by=-self.shift))
                self.shift = -self.shift
            case "keep":
                self.core.pause_scheduler("keep", True)
                self.change("call")
                self.core.resume_scheduler()
        (output,) = self._to_the_end()
        self.worker.worker.report = real
        return self._told(output)

    def load_there_and_back(self, prompt: list[int], adapter: dict[str, Any], tokens: int) -> list[int]:
        """The answer to a request in the midst of which its adapter is loaded with other weights, and then with those
        before. All its steps between are within one page."""
        from adapters import written

        self._add("running", prompt, adapter, tokens)
        (done, steps) = list[Any](), 0
        while not done:
            done = [output for output in self.llm.llm_engine.step() if output.finished]
            steps += 1
            if seed := {40: 2, 60: 1}.get(steps):
                written(Path(adapter["lora_path"]), seed)
                self.load(adapter | {"load_inplace": True})
        self.drain()
        return list(self._told(done[0])["tokens"])

    def _add(self, name: str, prompt: list[int], adapter: dict[str, Any], tokens: int = SMALL) -> None:
        self.llm.llm_engine.add_request(
            name, {"prompt_token_ids": prompt}, sampling(tokens, logprobs=1), lora_request=self._lora(adapter)
        )

    def change(self, how: str) -> None:
        """Change the model's weights, and the second time back. "pause", "sleep": while the engine is in it, for which
        it empties its caches; "call": by a remote call; "model": as a program can that has the engine in its own
        process. After these vLLM's caches are emptied: kvarve's tier with what vLLM has above it."""
        self.shift = -self.shift
        change, driver = partial(shifted, by=self.shift), self.core.model_executor.driver_worker
        if how == "pause":
            self.core.pause_scheduler("abort", True)
            change(driver)
            self.core.resume_scheduler()
        elif how == "sleep":
            self.llm.sleep(level=2)
            self.llm.collective_rpc(change)
            self.llm.wake_up()
        else:
            if how == "call":
                self.llm.collective_rpc(change)
            else:
                change(driver)
            self.reset(everywhere=self.seam == "tiering")

    def change_in_the_midst(self, prompt: list[int]) -> None:
        """A request in the midst of which the weights change."""
        self._to_the_midst(prompt)
        self.shift = -self.shift
        self.llm.collective_rpc(partial(shifted, by=self.shift))
        self._to_the_end()

    def _to_the_midst(self, prompt: list[int], adapter: Any = None) -> None:
        engine = self.llm.llm_engine
        engine.add_request("running", {"prompt_token_ids": prompt}, sampling(4), lora_request=adapter)
        while not any(request.num_computed_tokens > len(prompt) // 2 for request in self.core.scheduler.running):
            engine.step()

    def _to_the_end(self) -> list[Any]:
        while not (ended := [output for output in self.llm.llm_engine.step() if output.finished]):
            pass
        self.drain()
        return ended

    def drain(self) -> bool:
        """Step until no copy is in flight; False if some hang."""
        steps, end = 0, time.monotonic() + SETTLED_S
        while steps < SETTLED or time.monotonic() < end:
            if not self.core.scheduler.has_requests():
                return True
            self.core.step()
            steps += 1
        return False

    def reset_while_saves_are_under_way(self, prompt: list[int], late: int) -> bool:
        """Empty all caches right after a request, whose saves end `late` reports after they have ended, as copies do
        that a GPU makes in its own time."""

        real, do, held = self.worker.worker.report, self.worker.worker.do, list[tuple[int, Any]]()
        saves = set[int]()

        def report() -> Any:
            found, kept = real(), list[Any]()
            for event in found.events:
                held.append((late, event)) if getattr(event, "op", None) in saves else kept.append(event)
            kept += [event for left, event in held if not left]
            held[:] = [(left - 1, event) for left, event in held if left]
            return found._replace(events=kept)

        def noted(orders: list[Any]) -> None:
            saves.update(order.op for order in orders if getattr(order, "source", None) is Tier.DEVICE)
            do(orders)

        self.worker.worker.report, self.worker.worker.do = report, noted
        self.llm.generate([{"prompt_token_ids": prompt}], sampling(2), use_tqdm=False)
        assert self.scheduler._held, "no save is under way"
        emptied = bool(self.core.reset_prefix_cache(True, True))
        self.worker.worker.report, self.worker.worker.do = real, do
        return emptied

    def pause_while_stores_hang(self, prompt: list[int], most: int) -> int:
        """The steps that the engine takes after a request until it has nothing to do, at most so many."""
        self.storage.stall("put")
        self.llm.generate([{"prompt_token_ids": prompt}], sampling(2), use_tqdm=False)
        steps = 0
        while self.core.scheduler.has_requests() and steps < most:
            self.core.step()
            steps += 1
        assert self.scheduler.scheduler.core.copies.ops, "no store is under way"
        self.core.pause_scheduler("abort", True)
        self.core.resume_scheduler()
        self.storage.release()
        return steps

    def storm(self, seed: int, prompts: list[list[int]], tokens: int, aborts: int) -> dict[str, Any]:
        """Requests that arrive while others are computed, some of which are aborted at any time."""
        dice, engine = random.Random(seed), self.llm.llm_engine
        before = self._preemptions()
        left, outputs, gone = dict(enumerate(prompts)), {}, []
        live: set[str] = set()
        for _ in range(20_000):
            if left and dice.random() < 0.3:
                number, prompt = left.popitem()
                given = sampling(dice.randrange(1, tokens), logprobs=1)
                engine.add_request(str(number), {"prompt_token_ids": prompt}, given)
                live.add(str(number))
            if live and aborts and dice.random() < 0.05:
                name = dice.choice(sorted(live))
                engine.abort_request([name])
                live.discard(name)
                gone.append(name)
                aborts -= 1
            if dice.random() < 0.02:
                self.llm.reset_prefix_cache()
            for output in engine.step():
                if output.finished and output.request_id in live:
                    live.discard(output.request_id)
                    outputs[output.request_id] = self._told(output)
            if not left and not live:
                break
        assert not live and not left, f"requests hang: {sorted(live)}"
        drained = self.drain()
        pool = self.core.scheduler.kv_cache_manager.block_pool
        return {
            "outputs": outputs,
            "aborted": gone,
            "drained": drained,
            "preempted": self._preemptions() - before,
            "used_blocks": pool.num_gpu_blocks - pool.get_num_free_blocks() - 1,
        }

    def abort_a_load(self, prompt: list[int]) -> None:
        """A request is aborted while a read from storage, for it, hangs."""
        stalls = self.storage.counts["stall"]
        self.storage.stall("get")
        engine = self.llm.llm_engine
        engine.add_request("aborted", {"prompt_token_ids": prompt}, sampling(SMALL))
        while self.storage.counts["stall"] == stalls:
            engine.step()
        engine.abort_request(["aborted"])
        engine.step()
        self.storage.release()

    def about(self) -> dict[str, Any]:
        found: dict[str, Any] = {"page": self.core.scheduler.block_size}
        if self.seam in OURS:
            found["stats"] = self.scheduler.scheduler.stats() | {"failed_loads": self.scheduler.planner.failed_loads}
            found["left"] = len(self.scheduler.scheduler.core.leases) + sum(self.scheduler._held.values())
        elif self.seam == "tiering":
            found["stats"] = dict(self.tier.chunks.counts)
            found["left"] = len(self.tier.chunks._jobs) + len(self.tier.loading)
        return found | {"restored": self.prints.restored, "wrong": self.prints.wrong}

    def evicted(self) -> int:
        """What this engine's storage has evicted."""
        return int(self.storage.inner.usage().evicted)

    def metrics(self) -> dict[str, float]:
        return {
            " ".join([metric.name, *(metric.labels[name] for name in sorted(metric.labels) if name in LABELS)]): value
            for metric in self.llm.get_metrics()
            if (value := getattr(metric, "value", None)) is not None
        }

    def stored_events(self) -> list[dict[str, Any]]:
        return [
            {"medium": event.medium, "group": event.group_idx, "kind": event.kv_cache_spec_kind}
            for event in self.events
            if type(event).__name__ == "BlockStored"
        ]

    def spoil_host(self) -> int:
        """Change a byte in every page in kvarve's host memory, where pools may have slots at the same address."""
        from kvarve.system.regions import address

        spoiled = set[int]()
        for arena in self.worker.worker.host:
            for slot in range(arena.slots):
                record = arena.record(slot)
                if bytes(record[:8]) == b"kvarvepg" and address(record) not in spoiled:
                    record[300] ^= 1
                    spoiled.add(address(record))
        return len(spoiled)

    def spoil_storage(self, how: str) -> int:
        count = 0
        for name in self._stored_names():
            if not self.storage.inner.exists([name])[0]:
                continue
            count += 1
            if how == "corrupt":
                self.storage.flip(name)
            elif how == "short":
                self.storage.truncate(name, 300)  # its header, and little else
            else:
                self.storage.inner.delete([name])
        return count

    def trouble(self, how: str) -> None:
        """From now on every call of the storage fails ("dead") or hangs ("stall")."""
        if how == "dead":
            self.storage.dead = True
        else:
            self.storage.stall()

    def recover(self) -> None:
        """The storage works again, and kvarve has noticed."""
        self.storage.dead = False
        self.storage.release()
        while not self.guard.up:
            time.sleep(0.01)
        self.drain()

    def _stored_names(self) -> list[str]:
        if self.seam == "tiering":
            return [self.tier.chunks.name(bytes.fromhex(key)) for _, key in self.prints.pages()]
        from kvarve.pages.keys import object_name, root_key

        identity = self.worker.worker.identity
        root = root_key(identity.fingerprint(), "")
        return [object_name(root, bytes.fromhex(key), identity.pools[pool].name) for pool, key in self.prints.pages()]

    def _preemptions(self) -> float:
        return sum(metric.value for metric in self.llm.get_metrics() if metric.name == "vllm:num_preemptions")

    def _told(self, output: Any) -> dict[str, Any]:
        (best,) = output.outputs
        chosen = [float(found[token].logprob) for token, found in zip(best.token_ids, best.logprobs, strict=True)]
        return {"tokens": [*best.token_ids], "logprobs": chosen, "cached": output.num_cached_tokens}


LABELS = {"source", "group", "operation", "result"}  # of metrics, which tell them apart

if __name__ == "__main__":
    serve(Watched)
