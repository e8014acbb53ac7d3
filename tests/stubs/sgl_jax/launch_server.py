"""`python -m sgl_jax.launch_server`, without a model."""

from tests.sgl_jax_stub import main

if __name__ == "__main__":
    main()
