"""TRL's asynchronous trainer on a CPU: the distribution that it takes for vLLM's, a model for it, and a program that trains."""
