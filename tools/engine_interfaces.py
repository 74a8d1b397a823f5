"""Write what kvarve uses of an engine: the signatures of its hooks in some versions, from their unpacked wheels.

    python tools/engine_interfaces.py vllm 0.32=FOLDER/vllm 0.33=OTHER/vllm
    python tools/engine_interfaces.py sglang 0.5.23=FOLDER/sglang

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
    "sglang": {
        "srt/plugins/__init__.py": ": load_plugins",
        "srt/arg_groups/resolution_hooks.py": ": register_resolution_hook",
        "srt/arg_groups/overrides.py": ": declare_resolution",
        "srt/arg_groups/model_override_base.py": ": resolving_view",
        "srt/arg_groups/hicache_hook.py": ": handle_hicache",
        "srt/arg_groups/fields/memory.py": """
            Memory: enable_unified_cache_external_linker unified_cache_external_linker_backend
              unified_cache_external_linker_config""",
        "srt/mem_cache/unified_cache/linker_factory.py": ": create_unified_cache_linker",
        "srt/mem_cache/unified_cache/unified_cache_linker.py": """
            UnifiedCacheLinker: record_offload_ready lookup load start_layer_wise_loading finish_layer_wise_loading
              cancel_queued_load offload num_completed_offloads pop_completed_offload reset close
            LayerWiseLoadCounter: __init__ set_consumer wait_until
            UnifiedCacheLinkerWrapper: __init__ match _offload_node release_request""",
        "srt/mem_cache/unified_radix_cache.py": """
            UnifiedRadixCache: get_prefix_hash_values init_cache_linker finish_external_linker_loads
              check_prefetch_progress finish_storage_prefetch_admission path_device_indices _all_reduce_attn_groups""",
        "srt/managers/scheduler.py": "Scheduler: _prefetch_kvcache",
        "srt/mem_cache/hybrid_cache/linker_pool_assembler.py": """
            DevicePoolEntry: __init__
            : resolve_hybrid_device_pool_group""",
        "srt/mem_cache/cache_init_params.py": """
            CacheInitParams: page_size sliding_window_size token_to_kv_pool_allocator req_to_token_pool
              mtp_draft_device_pools sidecar_draft_device_pools mtp_draft_mamba_pools""",
        "srt/mem_cache/memory_pool.py": """
            : MHATokenToKVPool MLATokenToKVPool DSATokenToKVPool HybridLinearKVPool MambaPool""",
        "srt/mem_cache/hicache_storage.py": """
            HiCacheStorage: register_mem_pool_host register_mem_host_pool_v2 batch_exists batch_exists_v2 batch_get_v1
              batch_set_v1 batch_get_v2 batch_set_v2 get batch_get set batch_set exists clear get_stats
            HiCacheStorageConfig: tp_rank tp_size pp_rank pp_size attn_cp_rank attn_cp_size is_mla_model extra_config
            PoolTransfer: name keys device_indices host_indices hit_policy
            PoolTransferResult: restorable_prefix_pages""",
        "srt/model_executor/model_runner_components/weight_updater.py": """
            WeightUpdater: begin_weight_update update_weights_from_disk load_weights_from_distributed
              update_weights_from_tensor update_weights_from_ipc end_weight_update""",
        "srt/runtime_context.py": ": get_parallel get_server_args get_serving",
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
