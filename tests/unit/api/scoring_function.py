"""A function of a module."""


def length_of(completions: list[str]) -> list[float]:
    return [float(len(each)) for each in completions]
