"""vLLM calls `load` in each of its processes (entry point `vllm.general_plugins`): kvarve's connector has a name, and
with KVARVE=1 an engine has kvarve unless its command says otherwise.

    KVARVE=1 vllm serve MODEL
    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvarveConnector"}'

vLLM lets an exception here end the process, which is what a wrong variable should do.
"""

import logging
import os
from functools import wraps
from typing import Any

from kvarve.connectors import engine_defaults

log = logging.getLogger("vllm.kvarve")

NAME, MODULE = "KvarveConnector", "kvarve.connectors.vllm.connector"
UNIT = 64  # tokens between the places where a hybrid's prompts can hit


def load() -> None:
    """May be called any number of times."""
    asked = engine_defaults.asked()
    try:
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.engine.arg_utils import EngineArgs

        named, create = KVTransferConfig.__post_init__, EngineArgs.create_engine_config
        if NAME not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(NAME, MODULE, NAME)
    except (ImportError, AttributeError) as error:
        if asked:
            raise SystemExit(
                f"kvarve cannot work with this vLLM ({error}): run `kvarve doctor`, or unset KVARVE"
            ) from None
        return
    if hasattr(create, "__wrapped__") and getattr(create, "by_kvarve", False):
        return

    @wraps(named)
    def post_init(self: Any) -> None:
        if self.kv_connector == NAME and self.kv_role is None:
            self.kv_role, self.kv_load_failure_policy = "kv_both", "recompute"
        named(self)

    @wraps(create)
    def create_engine_config(self: Any, *given: Any, **more: Any) -> Any:
        _complete(self, asked)
        return create(self, *given, **more)

    create_engine_config.by_kvarve = True  # type: ignore[attr-defined]
    KVTransferConfig.__post_init__ = post_init
    EngineArgs.create_engine_config = create_engine_config


def _complete(args: Any, asked: bool) -> None:
    """Give an engine's arguments what they lack. ConfigError: a variable cannot be read."""
    transfer, engines = args.kv_transfer_config, args.data_parallel_size_local or args.data_parallel_size
    if transfer is not None:
        if transfer.kv_connector == NAME:
            extra = transfer.kv_connector_extra_config
            transfer.kv_connector_extra_config = engine_defaults.completed(extra, engines)
        return
    if not asked:
        return
    if args.kv_offloading_size is not None:
        log.warning("kvarve is left out, as --kv-offloading-size asks for another offloading")
        return
    if args.enable_prefix_caching is False:
        log.warning("kvarve is left out, as --no-enable-prefix-caching turns off the hashes that name its pages")
        return
    from vllm.config import KVTransferConfig

    found = engine_defaults.settings(os.environ, engines)
    args.kv_transfer_config = KVTransferConfig(kv_connector=NAME, kv_connector_extra_config=found)
    log.info("KVARVE=1: an engine has %s", engine_defaults.said(found))
