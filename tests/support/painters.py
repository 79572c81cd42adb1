"""Sentences about painters, for generated questions."""

PAINTERS = "Ada Brown,Bo Carver,Cleo Dunn,Dov Ellis,Ema Frost,Fay Grant,Gus Hale,Ivy Jones".split(",")


TOWNS = ["Marwick", "Norvale", "Oakham", "Penrose"]


def painter_sentence(number: int) -> str:
    return f"{PAINTERS[number]} is painter number {number} and lives in {TOWNS[number % 4]}."
