// /// script
// dependencies = ["ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "zod@4.6.7"]
// ///
// Vercel's AI SDK with its provider for servers like OpenAI's.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: "penstock", baseURL: `${url}/v1`, apiKey: "sk-x", supportsStructuredOutputs: true });
const asked = { model: provider("demo"), prompt: "What is 3 + 4?", temperature: 0, maxRetries: 0 };
const numbers = z.object({ a: z.number().int(), b: z.number().int() });
const add = { description: "Add two numbers.", inputSchema: numbers };

function check(answer, wanted = "7") {
  if (!String(answer).includes(wanted)) throw new Error(`no ${wanted} in the answer ${answer}`);
}

const features = {
  async chat() {
    check((await generateText(asked)).text);
  },
  async stream() {
    let text = "";
    for await (const part of streamText(asked).textStream) text += part;
    check(text);
  },
  async tools() {
    const { toolCalls } = await generateText({ ...asked, tools: { add: tool(add) } });
    check(toolCalls[0].input.a + toolCalls[0].input.b);
  },
  async structured() {
    const { output } = await generateText({ ...asked, output: Output.object({ schema: numbers }) });
    check(typeof output.b, "number");
  },
  async embeddings() {
    const { embeddings } = await embedMany({ model: provider.embeddingModel("demo"), values: ["a cat", "a boat"] });
    check(embeddings.length, "2");
  },
  async agent() {
    const tools = { add: tool({ ...add, execute: async ({ a, b }) => a + b }) };
    const { steps, text } = await generateText({ ...asked, tools, stopWhen: stepCountIs(4) });
    check(steps.length, "2");
    check(text);
  },
};

for (const [feature, run] of Object.entries(features)) {
  const start = performance.now();
  let error = null;
  try {
    await run();
  } catch (problem) {
    console.error(problem);
    error = `${problem.name}: ${problem.message}`.slice(0, 500);
  }
  console.log(JSON.stringify({ feature, error, s: Math.round(performance.now() - start) / 1000 }));
}
