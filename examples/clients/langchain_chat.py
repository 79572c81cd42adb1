"""LangChain's ChatOpenAI: a chat with a system prompt, a stream, an answer as an object.

pip install langchain-openai; dlm-rag serve; python langchain_chat.py [ADDRESS]
"""

import sys

from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Answer(BaseModel):
    """What this server can write into an object."""

    answer: str
    sources: list[str]


address = sys.argv[1] if sys.argv[1:] else "http://127.0.0.1:8000/v1"
chat = ChatOpenAI(model="dlm-rag-smollm2", base_url=address, api_key="none")
messages = [("system", "Be brief."), ("user", "What is Kellerup?")]
answer = chat.invoke(messages)
print(answer.content)
for chunk in chat.stream([*messages, answer, ("user", "What is it?")]):
    print(chunk.content, end="", flush=True)
print()
print(repr(chat.with_structured_output(Answer, method="json_schema").invoke(messages)))
