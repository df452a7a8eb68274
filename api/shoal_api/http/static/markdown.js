// The notes of a job: the usual part of Markdown as elements. Text of users is never written as markup, so HTML in it is text.
//   # heading   - item   1. item   > quote   ``` code ```   **bold**   *emphasis*   `code`   [words](address)
import { element } from "./dom.js";

const isFence = (line) => line.startsWith("```");
const isPlain = (line) => line.trim() && !isFence(line) && !BLOCKS.some(([begin]) => begin.test(line));
const list = (name, items) =>
  element(
    name,
    items.map((item) => element("li", inline(item))),
  );
// How each line of a kind of block begins, and the elements of such lines, of which that is taken away.
const BLOCKS = [
  [/^#\s+/, (lines) => lines.map((line) => element("h3", inline(line)))],
  [/^##\s+/, (lines) => lines.map((line) => element("h4", inline(line)))],
  [/^###\s+/, (lines) => lines.map((line) => element("h5", inline(line)))],
  [/^####\s+/, (lines) => lines.map((line) => element("h6", inline(line)))],
  [/^\s*[-*]\s+/, (lines) => list("ul", lines)],
  [/^\s*\d+\.\s+/, (lines) => list("ol", lines)],
  [/^>\s?/, (lines) => element("blockquote", inline(lines.join(" ")))],
];

export function markdown(text) {
  const made = [],
    lines = text.split("\n");
  const take = (matches) => {
    const end = lines.findIndex((line) => !matches(line));
    return lines.splice(0, end < 0 ? lines.length : end);
  };
  while (lines.length) {
    const [begin, make] = BLOCKS.find(([begin]) => begin.test(lines[0])) ?? [];
    if (isFence(lines[0])) {
      lines.shift();
      made.push(element("pre", take((line) => !isFence(line)).join("\n")));
      lines.shift();
    } else if (begin) made.push(make(take((line) => begin.test(line)).map((line) => line.replace(begin, ""))));
    else if (isPlain(lines[0])) made.push(element("p", inline(take(isPlain).join(" "))));
    else lines.shift();
  }
  return made.flat();
}

const PARTS = /`([^`]+)`|\*\*([^*]+)\*\*|\*([^*]+)\*|\[([^\]]+)\]\(([^()\s]+)\)/;

function inline(text) {
  const found = PARTS.exec(text);
  if (!found) return text;
  const [whole, code, bold, emphasis, words, address] = found;
  const made =
    (code && element("code", code)) ||
    (bold && element("strong", inline(bold))) ||
    (emphasis && element("em", inline(emphasis))) ||
    linked(words, address);
  return [text.slice(0, found.index), made, inline(text.slice(found.index + whole.length))];
}

// Addresses of the web and of this host only: any other, such as one that runs a script, stays text.
function linked(words, address) {
  try {
    const protocol = new URL(address, location.href).protocol.slice(0, -1);
    if (["http", "https"].includes(protocol)) return element("a", inline(words), { href: address, rel: "noreferrer" });
  } catch {
    /* not an address */
  }
  return element("span", `${words} (${address})`);
}
