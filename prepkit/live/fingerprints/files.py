"""Fingerprints of exported weights, out of their files."""

from __future__ import annotations

from pathlib import Path

from prepkit.live.fingerprints.tensor import as_hex, fingerprint


def of_files(path: str) -> dict[str, str]:
    """Name to fingerprint of every tensor in a safetensors file, or in those of a folder; one tensor lies in memory.

    Raises ``FileNotFoundError`` where there is none.
    """
    from safetensors import safe_open

    given = Path(path)
    files = [given] if given.is_file() else sorted(given.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"{path} has no safetensors file; give what ready.export or save_pretrained has written"
        )
    found: dict[str, str] = {}
    for one in files:
        with safe_open(one, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                found[name] = as_hex(fingerprint(file.get_tensor(name)))
    return found
