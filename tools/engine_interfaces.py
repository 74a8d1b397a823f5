"""Write what kvarve uses of vLLM: the signatures of its hooks in some versions, from their unpacked wheels.

    python tools/engine_interfaces.py vllm 0.32=FOLDER/vllm 0.33=OTHER/vllm

The first version is the one that tests run, the others are read.
"""

import json
import sys
from pathlib import Path

from kvarve.connectors import engine_interfaces

# By engine and file: names of functions and fields, those of a class behind its own.
HOOKS: dict[str, dict[str, str]] = {
    "vllm": {
        "distributed/kv_transfer/kv_connector/v1/base.py": """
            KVConnectorBase_V1: __init__ _get_connector_metadata bind_gpu_block_pool build_connector_meta
              build_connector_worker_meta build_kv_connector_stats build_prom_metrics get_external_cache_hit_sources
              get_handshake_metadata get_kv_connector_stats get_num_new_matched_tokens get_transfer_results
              has_pending_block_frees has_pending_push_work register_kv_caches request_finished requires_kv_delivery
              reset_cache save_kv_layer set_xfer_handshake_metadata_pp_aware shutdown start_load_kv take_events
              update_connector_output update_state_after_alloc wait_for_layer_load wait_for_save
            SupportsHMA: request_finished_all_groups
            KVConnectorWorkerMetadata: aggregate""",
        "distributed/kv_transfer/kv_connector/factory.py": "KVConnectorFactory: register_connector",
        "distributed/kv_transfer/kv_connector/v1/metrics.py": """
            KVConnectorPromMetrics: __init__ observe
            KVConnectorStats: aggregate""",
        "distributed/kv_transfer/kv_transfer_state.py": ": get_kv_transfer_group",
        "distributed/parallel_state.py": ": get_pp_group",
        "engine/arg_utils.py": """
            EngineArgs: create_engine_config kv_transfer_config kv_offloading_size enable_prefix_caching
              data_parallel_size_local""",
        "config/kv_transfer.py": "KVTransferConfig: __post_init__",
        "config/cache.py": "CacheConfig: prefix_match_unit prefix_cache_retention_interval",
        "v1/executor/abstract.py": "Executor: get_kv_cache_specs collective_rpc",
        "v1/engine/core.py": """
            EngineCore: add_lora add_request collective_rpc remove_lora reset_prefix_cache resume_scheduler
            : EngineCoreProc""",
        "v1/core/sched/scheduler.py": """
            Scheduler: _handle_blocked_waiting_request _handle_failed_recving _update_from_kv_xfer_finished""",
        "v1/core/sched/output.py": "KVConnectorBlockState: boundary_state_offloads",
        "v1/core/kv_cache_utils.py": ": maybe_convert_block_hash resolve_kv_cache_block_sizes",
        "v1/core/block_pool.py": "BlockPool: free_blocks touch",
        "v1/kv_cache_interface.py": """
            KVCacheConfig: cache_hit_alignment_tokens kv_cache_groups num_blocks prefix_cacheable_group_ids
            : get_kv_cache_spec_kind get_kv_cache_spec_sliding_window""",
        "v1/metrics/cache_hit_source.py": ": CacheHitSource",
        "v1/outputs.py": "KVConnectorOutput: finished_recving kv_connector_worker_meta",
        "v1/kv_offload/tiering/base.py": """
            SecondaryTierManager: __init__ drain_jobs get_finished_jobs lookup on_new_request submit_load
              submit_store""",
    },
}


def hooks_of(engine: str) -> list[str]:
    """Each as "FILE NAME"."""
    found, within = [], ""
    for file, names in HOOKS[engine].items():
        for word in names.split():
            if word.endswith(":"):
                within = word[:-1] + "." * (word != ":")
            else:
                found.append(f"{file} {within}{word}")
    return sorted(found)


def main(engine: str, *versions: str) -> None:
    file = Path(engine_interfaces.__file__).with_suffix(".json")
    told = json.loads(file.read_text()) if file.exists() else {}
    names, roots = zip(*(version.split("=", 1) for version in versions), strict=True)
    hooks: dict[str, list[str]] = {hook: [] for hook in hooks_of(engine)}
    for name, root in zip(names, roots, strict=True):
        found = engine_interfaces.signatures(Path(root), hooks)
        for hook, known in hooks.items():
            if hook not in found:
                print(f"{name}: {hook} is missing")
            elif found[hook] not in known:
                known.append(found[hook])
    told[engine] = {"runs": names[:1], "reads": names[1:], "hooks": hooks}
    file.write_text(json.dumps(told, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
