"""Reading and writing checkpoints: safetensors files and folders of them."""
