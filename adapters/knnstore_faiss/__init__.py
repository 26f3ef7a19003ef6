"""FAISS behind the `Datastore` protocol."""
