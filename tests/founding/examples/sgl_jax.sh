python -m sgl_jax.launch_server --model-path meta-llama/Llama-3-8B \
    --lora-paths /models/lora/translation /models/lora/summarization --max-loras-per-batch 4 --tp-size 2
