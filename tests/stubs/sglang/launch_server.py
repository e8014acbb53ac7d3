"""`python -m sglang.launch_server`, without a model."""

from tests.sglang_stub import main

if __name__ == "__main__":
    main()
