"""SGLang calls `load` in each of its processes (entry point `sglang.srt.plugins`): with KVARVE=1 a server has kvarve's
linker unless its command, or what SGLang makes of it, says otherwise.

    KVARVE=1 python -m sglang.launch_server --model-path MODEL

It decides in the step of SGLang's resolution that reads the settings of caches, so it sees what a model or another
option has changed by then. SGLang logs an exception of `load` and goes on; one in that step ends the command, which is
what a wrong variable should do. Processes that a server starts have its settings, and decide nothing.
"""

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from kvarve.connectors import engine_defaults
from kvarve.connectors.engine_settings import ConnectorSettings
from kvarve.connectors.levels import port_of
from kvarve.storage.urls import has_secret

log = logging.getLogger("sglang.kvarve")

MODULE = "kvarve.connectors.sglang.linker"
STEP = "handle_hicache"
# What excludes the linker, in SGLang or here, by the name of the setting: the values with which it can work.
_WITHOUT: Mapping[str, tuple[Any, ...]] = {
    "enable_hierarchical_cache": (False,),
    "hicache_storage_backend": (None,),
    "radix_cache_backend": (None,),
    "disable_radix_cache": (False,),
    "enable_lmcache": (False,),
    "enable_flexkv": (False,),
    "enable_unified_memory": (False,),
    "enable_kv_cache_sharding": (False,),
    "enable_int8_mamba_checkpoint": (False,),
    "speculative_algorithm": (None,),
    "pp_size": (1,),
    "attn_cp_size": (1,),
    "dcp_size": (1,),
    "disaggregation_mode": ("null", "prefill"),
}


def load() -> None:
    """Once a process. It raises nothing: SGLang would go on after a traceback."""
    try:
        from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

        register_resolution_hook(STEP)(_resolve)
    except (ImportError, ValueError) as error:
        if os.environ.get("KVARVE", "").strip().lower() not in engine_defaults.OFF:
            log.error("KVARVE changes nothing, as kvarve cannot work with this SGLang (%s): run kvarve doctor", error)


def _resolve(args: Any, previous: Callable[[Any], None]) -> None:
    """SGLang's step, with kvarve's settings before it. ConfigError: a variable is wrong."""
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.arg_groups.overrides import declare_resolution

    found = _settings(resolving_view(args))
    if found:
        declare_resolution(args, "kvarve", **found)
    previous(args)


def _settings(view: Any) -> dict[str, Any]:
    """What to set so that a server has kvarve, or its own kvarve has what it lacks; nothing if it has another cache."""
    asked = engine_defaults.asked()
    engines = max(1, view.dp_size * view.attn_dp_size // view.nnodes)  # of which each has its memory, on this machine
    if view.enable_unified_cache_external_linker:
        config = view.unified_cache_external_linker_config
        if isinstance(config, dict) and config.get("linker_module_path") == MODULE:
            given = engine_defaults.completed(config.get("linker_extra_config") or {}, engines)
            ConnectorSettings.read(given, "linker_extra_config")  # else a process of the server raises it much later
            return {"unified_cache_external_linker_config": {**config, "linker_extra_config": given}}
        instead = ["--enable-unified-cache-external-linker"]
    else:
        settings = {name: getattr(view, name, fine[0]) for name, fine in _WITHOUT.items()}
        instead = [_option(name, value) for name, value in settings.items() if value not in _WITHOUT[name]]
    if not asked:
        return {}
    if instead:
        log.warning("KVARVE=1 changes nothing, as this server has %s", " and ".join(instead))
        return {}
    found = engine_defaults.settings(os.environ, engines)
    ConnectorSettings.read(found, "KVARVE=1")
    port_of(engines - 1, os.environ)
    said = engine_defaults.said(found)
    if found["storage"] and has_secret(found["storage"]):
        del found["storage"]  # SGLang prints settings and serves them: the linker reads the variables again
    log.info("KVARVE=1: %s has %s", "each replica" if engines > 1 else "the server", said)
    return {
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": {
            "linker": "KvarveOrNone",
            "linker_module_path": MODULE,
            "linker_extra_config": found,
        },
    }


def _option(name: str, value: Any) -> str:
    return f"--{name.replace('_', '-')}{'' if value is True else f' {value}'}"
