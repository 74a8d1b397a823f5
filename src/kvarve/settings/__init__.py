"""How settings are read: flags, environment, TOML files, an engine's extra configuration, and other engines' flags.

`kvarve serve`'s own are in `reference.server.serve_settings`, a cache's in `cache.config`, its policies in
`core.policies`.
"""
