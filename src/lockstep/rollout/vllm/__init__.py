"""vLLM behind the engine protocol. Only this package imports vLLM, and only its modules beside this one do."""
