"""Memory that holds pages: arenas of slots on the device, in the host or of an engine, and copies between them."""
