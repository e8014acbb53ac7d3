python -m dynamo.vllm --lora-downloader-plugin="dynamo.lora.downloader.HuggingFaceDownloader"
python -m dynamo.vllm --lora-downloader-plugin="my-org.lora.downloader.CustomDownloader"
