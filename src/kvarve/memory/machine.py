"""How much memory a device has, and whether it is the host's."""

import torch

_SHARES_HOST = ("cpu", "mps")  # devices that compute in the host's own memory


def on_host(device: str | torch.device) -> bool:
    """Whether a device's memory is host memory."""
    return torch.device(device).type in _SHARES_HOST


def device_bytes(device: str | torch.device) -> int | None:
    """The total memory in bytes of a device that has its own; None if it is unknown."""
    try:
        return int(torch.cuda.mem_get_info(torch.device(device))[1]) if torch.device(device).type == "cuda" else None
    except (RuntimeError, AssertionError):
        return None


def cannot_pin() -> str | None:
    """Why host memory cannot be pinned for a GPU; None: it can, or there is no GPU."""
    if not torch.cuda.is_available():
        return None
    try:
        torch.empty(1 << 20, dtype=torch.uint8).pin_memory()
    except RuntimeError as error:
        return str(error)
    return None
