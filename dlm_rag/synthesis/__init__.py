"""Training rows from what people have: traces of questions, chains in a corpus, texts by another writer."""
