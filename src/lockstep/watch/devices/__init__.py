"""The GPUs of a host: what NVML reports of them, which process uses which, and what that proves."""
