// Sample questions, all in one request: browsers open few connections to a server.

import { call, events } from "./api.js";

const QUESTIONS = [
  "Why is the sky blue?",
  "Name three rivers and the countries that they flow through.",
  "Write a short story about a lighthouse keeper.",
  "What is the capital of Portugal?",
  "Explain how a bicycle stays upright.",
  "List the planets of the solar system in order.",
  "Write a Python function that adds the numbers of a list.",
  "Say hello in five languages.",
];

/** Send `count` questions with the chat's settings. `notice` is called with what goes wrong. */
export async function sendSamples(count, settings, notice) {
  const prompt = Array.from({ length: count }, (_, i) => `Question: ${QUESTIONS[i % QUESTIONS.length]}\nAnswer:`);
  try {
    for await (const chunk of events(await call("v1/completions", { body: { ...settings, prompt, stream: true } }))) {
      if (chunk.error) throw new Error(chunk.error.message);
    }
  } catch (error) {
    notice(`Sample questions: ${error.message}`);
  }
}
