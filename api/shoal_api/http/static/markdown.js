// The notes of a job: the usual part of Markdown as elements. Text of users is never written as markup, so HTML in it is text.
//   # heading   - item   1. item   > quote   ``` code ```   **bold**   *emphasis*   `code`   [words](address)
import { element } from "./dom.js";

export function markdown(text) {
  const made = [],
    lines = text.split("\n");
  for (let at = 0; at < lines.length;) {
    const line = lines[at],
      taken = (matches) => {
        const from = at;
        while (at < lines.length && matches(lines[at])) at += 1;
        return lines.slice(from, at);
      };
    const heading = /^(#{1,4})\s+(.*)/.exec(line);
    if (!line.trim()) at += 1;
    else if (heading) {
      made.push(element(`h${Math.min(6, heading[1].length + 2)}`, inline(heading[2])));
      at += 1;
    } else if (line.startsWith("```")) {
      at += 1;
      const code = taken((one) => !one.startsWith("```"));
      at += 1;
      made.push(element("pre", code.join("\n")));
    } else if (/^\s*[-*]\s/.test(line))
      made.push(
        element(
          "ul",
          taken((one) => /^\s*[-*]\s/.test(one)).map((one) => element("li", inline(one.replace(/^\s*[-*]\s+/, "")))),
        ),
      );
    else if (/^\s*\d+\.\s/.test(line))
      made.push(
        element(
          "ol",
          taken((one) => /^\s*\d+\.\s/.test(one)).map((one) => element("li", inline(one.replace(/^\s*\d+\.\s+/, "")))),
        ),
      );
    else if (line.startsWith(">"))
      made.push(
        element(
          "blockquote",
          inline(
            taken((one) => one.startsWith(">"))
              .map((one) => one.replace(/^>\s?/, ""))
              .join(" "),
          ),
        ),
      );
    else
      made.push(
        element(
          "p",
          inline(taken((one) => one.trim() && !/^(#{1,4}\s|```|>|\s*[-*]\s|\s*\d+\.\s)/.test(one)).join(" ")),
        ),
      );
  }
  return made;
}

const PARTS = /`([^`]+)`|\*\*([^*]+)\*\*|\*([^*]+)\*|\[([^\]]+)\]\(([^()\s]+)\)/;

function inline(text) {
  const found = PARTS.exec(text);
  if (!found) return text ? [text] : [];
  const [whole, code, bold, emphasis, words, address] = found;
  const made = code
    ? element("code", code)
    : bold
      ? element("strong", inline(bold))
      : emphasis
        ? element("em", inline(emphasis))
        : linked(words, address);
  return [
    ...(found.index ? [text.slice(0, found.index)] : []),
    made,
    ...inline(text.slice(found.index + whole.length)),
  ];
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
