// One answer: the request, what comes back, and the figures that the server measured.

import { streamChat } from "./api.js";

// Read an answer into `message` as it comes, and return {reason, usage, timeline, seed}. `fields` are pairs of a name
// and JSON, which is sent as it is, because a 64-bit seed does not fit a JavaScript number.
export async function readAnswer(messages, model, fields, message, changed, signal) {
  const fixed = { messages, stream: true, stream_options: { include_usage: true }, timeline: true };
  if (model) fixed.model = model;
  const given = fields.map(([name, value]) => `,${JSON.stringify(name)}:${value}`).join("");
  const found = {};
  for await (const [chunk, line] of streamChat(JSON.stringify(fixed).slice(0, -1) + given + "}", signal)) {
    if (chunk.usage) found.usage = chunk.usage;
    if (chunk.timeline) found.timeline = chunk.timeline;
    const choice = chunk.choices[0];
    if (!choice) continue;
    const { content, reasoning_content: reasoning } = choice.delta;
    if (content) message.content += content;
    if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
    if (content || reasoning) changed();
    if (choice.finish_reason) {
      found.reason = choice.finish_reason;
      found.seed = /"seed":\s*(-?\d+)/.exec(line)?.[1];
    }
  }
  return found;
}

// The line below an answer. Times are the engine's own, so they do not count the way to the browser.
export function figures({ reason, usage, timeline, seed }, context) {
  const notes = [];
  if (usage) notes.push(usage.completion_tokens + (usage.completion_tokens === 1 ? " token" : " tokens"));
  notes.push(...speeds(timeline?.choices[0]?.parts ?? []));
  if (usage) {
    const cached = usage.prompt_tokens_details.cached_tokens;
    notes.push(`prompt of ${usage.prompt_tokens} tokens` + (cached ? `, ${cached} of them cached` : ""));
  }
  if (reason === "length") notes.push(isFull(usage, context) ? "the context is full" : "stopped at max_tokens");
  if (!reason) notes.push("stopped");
  if (seed) notes.push("seed " + seed);
  return notes.join(" · ");
}

export const isFull = (usage, context) => usage?.total_tokens >= context;

function speeds(parts) {
  const notes = [], decoding = parts.filter(part => part.kind === "decode" && part.generated_tokens);
  const tokens = decoding.reduce((sum, part) => sum + part.generated_tokens, 0);
  const seconds = decoding.reduce((sum, part) => sum + part.duration_s, 0);
  if (tokens && seconds > 0) notes.push(perSecond(tokens / seconds) + " tokens/s");
  const first = parts.find(part => part.kind === "prefill");
  if (first) notes.push("first token after " + duration(first.at_s + first.duration_s));
  return notes;
}

const perSecond = rate => (rate < 100 ? rate.toFixed(1) : Math.round(rate).toString());
const duration = seconds => (seconds < 10 ? Math.round(seconds * 1000) + " ms" : seconds.toFixed(1) + " s");
