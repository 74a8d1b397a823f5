"""vLLM calls `load` in each of its processes (entry point `vllm.general_plugins`): kvarve's connector has a name, and
with KVARVE=1 an engine has kvarve unless its command says otherwise.

    KVARVE=1 vllm serve MODEL
    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvarveConnector"}'

vLLM lets an exception here end the process, which is what a wrong variable should do.
"""

import logging
import math
import os
from collections.abc import Callable
from functools import wraps
from typing import Any

from kvarve.connectors import engine_defaults
from kvarve.errors import ConfigError

log = logging.getLogger("vllm.kvarve")

NAME, MODULE = "KvarveConnector", "kvarve.connectors.vllm.connector"
UNITS = range(16, 65)  # tokens between the places where a prompt of a hybrid can hit


def load() -> None:
    """May be called any number of times. ConfigError: a variable is wrong, or this vLLM lacks what kvarve needs."""
    asked = engine_defaults.asked()
    try:
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.executor.abstract import Executor

        if NAME in KVConnectorFactory._registry:
            return
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
        _around(KVTransferConfig, "__post_init__", before=_role)
        _around(EngineArgs, "create_engine_config", before=_connector if asked else _settings, after=_made)
        _around(Executor, "get_kv_cache_specs", after=_unit)
    except (ImportError, AttributeError) as error:
        if asked:
            raise ConfigError(
                f"kvarve cannot work with this vLLM ({error}): run kvarve doctor, or unset KVARVE"
            ) from None


def _around(
    kind: type,
    name: str,
    before: Callable[[Any], None] = lambda _: None,
    after: Callable[[Any, Any], None] | None = None,
) -> None:
    """Have a method preceded and followed by calls with its object, and what it returned."""
    real = getattr(kind, name)

    @wraps(real)
    def around(self: Any, *given: Any, **more: Any) -> Any:
        before(self)
        found = real(self, *given, **more)
        if after is not None:
            after(self, found)
        return found

    setattr(kind, name, around)


def _role(transfer: Any) -> None:
    """By its name alone the connector has the only role and policy with which it works."""
    if transfer.kv_connector == NAME and transfer.kv_role is None:
        transfer.kv_role, transfer.kv_load_failure_policy = "kv_both", "recompute"


def _settings(args: Any) -> None:
    """Give a connector that an engine's arguments name the settings that it lacks."""
    transfer = args.kv_transfer_config
    if isinstance(transfer, dict):  # vLLM makes a config of it afterwards
        from vllm.config import KVTransferConfig

        transfer = args.kv_transfer_config = KVTransferConfig(**transfer)
    if transfer is not None and transfer.kv_connector == NAME:
        found = engine_defaults.completed(transfer.kv_connector_extra_config, _engines(args))
        transfer.kv_connector_extra_config = found


def _connector(args: Any) -> None:
    """The same, and an engine whose arguments name no connector gets kvarve's. ConfigError: a variable is wrong."""
    from vllm.config import KVTransferConfig

    instead = {
        "--kv-transfer-config": args.kv_transfer_config is not None,
        "--kv-offloading-size": args.kv_offloading_size is not None,
        "--no-enable-prefix-caching": args.enable_prefix_caching is False,
    }
    if any(instead.values()):
        _settings(args)
        if args.kv_transfer_config is None or args.kv_transfer_config.kv_connector != NAME:
            names = [name for name, given in instead.items() if given]
            log.warning("KVARVE=1 changes nothing, as this engine has %s", " and ".join(names))
        return
    found = engine_defaults.settings(os.environ, _engines(args))
    args.kv_transfer_config = KVTransferConfig(kv_connector=NAME, kv_connector_extra_config=found)
    args.has_kvarve_unasked = True
    log.info("KVARVE=1: an engine has %s", engine_defaults.said(found))


def _engines(args: Any) -> int:
    """How many engines of this command share the machine."""
    return int(args.data_parallel_size_local or args.data_parallel_size)


def _named(config: Any) -> bool:
    transfer = config.kv_transfer_config
    return transfer is not None and transfer.kv_connector == NAME


def _ours(config: Any) -> bool:
    """Whether an engine has kvarve by KVARVE=1, which also sets what its user has not."""
    return _named(config) and engine_defaults.asked()


def _made(args: Any, config: Any) -> None:
    """Take back what vLLM concludes from a connector that loads, and have it hand over the states of each block of a
    hybrid, also those in the midst of answers. With KVARVE=1 an engine that kvarve cannot serve goes without."""
    if _named(config) and (images := config.model_config.multimodal_config) is not None:
        # vLLM accepts images as embeddings from any client, even missing ones, where others compute the prompts.
        images.allow_missing_mm_embeddings, images.enable_mm_embeds = False, args.enable_mm_embeds
    if getattr(args, "has_kvarve_unasked", False):
        from kvarve.connectors.vllm.groups import check_engine

        try:
            check_engine(config)
        except ConfigError as error:
            log.warning("KVARVE=1 changes nothing, as this engine cannot have kvarve: %s", error)
            config.kv_transfer_config = None
    if _ours(config) and config.model_config.is_hybrid and config.cache_config.prefix_cache_retention_interval == 0:
        config.cache_config.prefix_cache_retention_interval = None


def _unit(executor: Any, specs: Any) -> None:
    """Have prompts of a hybrid hit inside of blocks, which have hundreds of tokens: as finely as these allow, once it
    is known how long they are."""
    if not _ours(executor.vllm_config):
        return
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

    cache = executor.vllm_config.cache_config
    found = [spec for worker in specs for spec in worker.values()]
    kinds = {get_kv_cache_spec_kind(spec).value for spec in found}
    if kinds == {"mamba", "full_attention"} and cache.prefix_match_unit is None:  # others' blocks are not divided
        unit = math.gcd(UNITS[-1], *(spec.block_size for spec in found))
        if unit in UNITS:
            cache.prefix_match_unit = unit
