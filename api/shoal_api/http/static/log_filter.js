// What filters of the log look at in a line, and what its search finds. Pure.
const ERROR = /\b(error|exception|traceback|critical|fatal|failed)\b/i,
  WARNING = /\bwarn(ing)?\b/i;

export const isEvent = (line) => line.stream === "shoal";
const levelOf = ({ text }) => (ERROR.test(text) ? "error" : WARNING.test(text) ? "warning" : "info");
// Made once for a line, when it comes.
export const prepared = (line) => ({ ...line, low: line.text.toLowerCase(), level: levelOf(line) });

// Words are looked for in any case, and so is a regular expression between slashes: /loss (nan|inf)/. find(line): the place of the first
// hit and its length, or null. mistake: what is wrong with the expression, which then finds nothing.
export function finder(words) {
  const low = words.toLowerCase(),
    between = /^\/(.+)\/$/.exec(words);
  if (!between)
    return {
      mistake: "",
      find(line) {
        const at = line.low.indexOf(low);
        return at < 0 ? null : [at, low.length];
      },
    };
  try {
    const pattern = new RegExp(between[1], "iu");
    return {
      mistake: "",
      find({ text }) {
        const hit = pattern.exec(text.trimEnd());
        return hit && [hit.index, hit[0].length];
      },
    };
  } catch (error) {
    return { mistake: error.message, find: () => null };
  }
}
