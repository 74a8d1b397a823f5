"""A page as bytes outside of the device: its record (`record`), the check in it (`seals`), compressed (`encodings`).

Host memory, every storage and the wire hold the same records.
"""
