// Sample questions, sent all at once, to see requests queue and run.

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

/** Send `count` questions with the chat's settings. `notice` is called with what goes wrong, once. */
export async function sendSamples(count, settings, notice) {
  const ask = async (question) => {
    const messages = [{ role: "user", content: question }];
    const body = { ...settings, messages, stream: true };
    for await (const chunk of events(await call("v1/chat/completions", { body }))) {
      if (chunk.error) throw new Error(chunk.error.message);
    }
  };
  const asked = Array.from({ length: count }, (_, i) => ask(QUESTIONS[i % QUESTIONS.length]));
  const failed = (await Promise.allSettled(asked)).find((each) => each.status === "rejected");
  if (failed) notice(`Sample questions: ${failed.reason.message}`);
}
