"""LangChain's ChatOpenAI: a chat with a system prompt, a stream.

pip install langchain-openai; dlm-rag serve; python langchain_chat.py [ADDRESS]
"""

import sys

from langchain_openai import ChatOpenAI

address = sys.argv[1] if sys.argv[1:] else "http://127.0.0.1:8000/v1"
chat = ChatOpenAI(model="dlm-rag-smollm2", base_url=address, api_key="none")
messages = [("system", "Be brief."), ("user", "What is Kellerup?")]
answer = chat.invoke(messages)
print(answer.content)
for chunk in chat.stream([*messages, answer, ("user", "What is it?")]):
    print(chunk.content, end="", flush=True)
print()
