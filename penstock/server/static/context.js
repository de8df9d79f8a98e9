// A full context: the oldest turns are left out, as `penstock chat` does, so that a conversation can always go on.

import { countTokens } from "./api.js";

const SHARE_FOR_ANSWER = 4;   // 1 / SHARE_FOR_ANSWER of the context is kept free for the answer

// Decide how many of the oldest messages to leave out so that an answer fits. Whole turns are left out, because
// templates expect alternating roles, and the last message always stays.
export async function messagesToLeaveOut(system, messages, { model, maxTokens, mustShorten }, signal) {
  const { name, context } = model;
  const room = context - Math.min(maxTokens ?? context, Math.floor(context / SHARE_FOR_ANSWER));
  const starts = [...messages.keys()].filter(at => at === 0 || messages[at].role === "user");
  const bytes = new TextEncoder().encode(messages.map(message => message.content).join("")).length;
  if (!mustShorten && bytes + 64 * messages.length < room / 2) return 0;   // a token has at least one byte
  const fits = async start => {
    if (mustShorten && start === 0) return false;
    try { return await countTokens([...system, ...messages.slice(start)], name, signal) <= room; } catch (error) {
      if (error.code === "context_length_exceeded") return false;   // so long that it was not even counted
      throw error;
    }
  };
  let low = 0, high = starts.length - 1;   // the first start that fits lies between them; the last one is not tried
  while (low < high) {
    const middle = Math.floor((low + high) / 2);
    if (await fits(starts[middle])) high = middle; else low = middle + 1;
  }
  return starts[low];
}
