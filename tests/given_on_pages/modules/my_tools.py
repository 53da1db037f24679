def weather(place: str) -> str:
    """The weather at a place.

    Args:
        place: a town.
    """
    return f"rain in {place}"
