"""Chat: messages and tools to a prompt, and an answer's text to reasoning, content and tool calls."""
