"""`kvarve bench`: requests of a known shape against a server, and what became of them, in rounds around a flush.

`workloads` makes the requests, `load` sends them, `figures` reduces their times to a table, `bench_command` is the
command line. Nothing here knows what is inside of the server: it is asked over HTTP, as any OpenAI client asks. `demo`
and `demo_vllm` are `kvarve demo`: rounds that show each tier.
"""
