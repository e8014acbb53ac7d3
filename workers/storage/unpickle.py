"""Converts pickled weights to safetensors: `python unpickle.py PICKLE SAFETENSORS`, in a process of its own.

torch's `weights_only` creates tensors and plain containers and calls nothing else. The agent itself never imports
torch, which takes several hundred MB. Exit status 3: torch or safetensors is missing. Exit status 4: the result could
not be written; the errno is on stderr.
"""

import re
import sys
import zipfile
from collections import Counter


def main() -> int:
    """Convert the file; returns the exit status. 1, with the error's class on stderr, if it is no state dict."""
    try:
        import torch  # noqa: PLC0415  (whether it is here is the question)
        from safetensors import SafetensorError  # noqa: PLC0415
        from safetensors.torch import save_file  # noqa: PLC0415
    except ImportError:
        return 3
    try:
        # Read as it is written, page by page; torch's format before 1.6 is no zip file and has to be read at once.
        is_mapped = zipfile.is_zipfile(sys.argv[1])
        state_dict = torch.load(sys.argv[1], map_location="cpu", weights_only=True, mmap=is_mapped)
        seen = Counter(tensor.untyped_storage().data_ptr() for tensor in state_dict.values())
        # Copies of those that share memory, which safetensors refuses.
        whole = {
            name: tensor.clone() if seen[tensor.untyped_storage().data_ptr()] > 1 else tensor.contiguous()
            for name, tensor in state_dict.items()
        }
        save_file(whole, sys.argv[2])
    except Exception as exc:  # noqa: BLE001  (the file is untrusted)
        # safetensors 0.8 (in Rust) reports disk errors only in its message.
        if isinstance(exc, SafetensorError) and (number := re.search(r"\(os error (\d+)\)", str(exc))):
            sys.stderr.write(number[1])
            return 4
        sys.stderr.write(type(exc).__name__)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
