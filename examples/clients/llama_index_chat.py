"""LlamaIndex's OpenAILike: a chat of two turns, the second as a stream, and a completion.

pip install llama-index-llms-openai-like; dlm-rag serve; python llama_index_chat.py [ADDRESS]
"""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

address = sys.argv[1] if sys.argv[1:] else "http://127.0.0.1:8000/v1"
llm = OpenAILike(
    model="dlm-rag-smollm2", api_base=address, api_key="none", is_chat_model=True, temperature=0.0
)
messages = [ChatMessage(role="user", content="What is Kellerup?")]
answer = llm.chat(messages)
print(answer.message.content)
messages += [answer.message, ChatMessage(role="user", content="What is it?")]
for part in llm.stream_chat(messages):
    print(part.delta or "", end="", flush=True)
print()
print(llm.complete("What is Night Ferry?"))
