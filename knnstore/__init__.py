"""knnstore: a memory that you can edit, for any Hugging Face language model."""
