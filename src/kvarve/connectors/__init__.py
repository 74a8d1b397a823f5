"""kvarve inside another engine: a folder for each, whose files that are named after the engine's interface import it.

An engine that owns device blocks drives `CacheScheduler` (through `vllm.block_plan`) and `CacheWorker` (with
`memory.engine_arena`): see `vllm.connector`. One that has a host tier of its own keeps its objects by
`transfer.storage_road`: see `vllm.chunks` and `sglang.objects`. `engine_settings` reads what operators write.
"""
