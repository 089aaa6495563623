"""vLLM behind the engine protocol. Only modules of this package import vLLM."""
