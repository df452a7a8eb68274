// Any number of lines in a box that scrolls. They are in blocks, and only blocks near the part in view have elements; another one
// keeps its height, or an estimate of it. A line may be of any height: the browser keeps what is in view where it is.
const BLOCK = 100,
  MARGIN = "150%",
  LINE_PX = 18;

export class LineList {
  // `box`: what scrolls; `inside`: the element of the blocks in it. `made(line)`: the element of a line. `atTop`: called when the
  // first line comes near to the part in view.
  constructor(box, inside, made, atTop) {
    this.box = box;
    this.inside = inside;
    this.made = made;
    this.blocks = [];
    this.owed = 0;
    this.of = new WeakMap();
    this.watch = new IntersectionObserver(
      (entries) => {
        for (const { target, isIntersecting } of entries) {
          const block = this.of.get(target);
          if (isIntersecting) this.fill(block);
          else if (this.box.clientHeight) this.empty(block);
        }
        if (entries.some(({ target, isIntersecting }) => isIntersecting && target === this.blocks[0]?.holder)) atTop();
      },
      { root: box, rootMargin: `${MARGIN} 0px` },
    );
  }

  replace(lines) {
    this.watch.disconnect();
    this.inside.replaceChildren();
    this.blocks = [];
    this.owed = 0;
    this.append(lines);
  }

  append(lines) {
    const last = this.blocks.at(-1),
      room = last ? BLOCK - last.lines.length : 0,
      more = lines.slice(0, room);
    if (more.length) {
      last.lines.push(...more);
      if (last.isFilled) last.holder.append(...more.map(this.made));
      else this.estimate(last);
    }
    const added = this.blocksOf(lines.slice(more.length));
    this.blocks.push(...added);
    this.inside.append(...added.map(({ holder }) => holder));
  }

  // What is in view stays there.
  prepend(lines) {
    const below = this.box.scrollHeight - this.box.scrollTop,
      added = this.blocksOf(lines);
    this.blocks.unshift(...added);
    this.inside.prepend(...added.map(({ holder }) => holder));
    this.box.scrollTop = this.box.scrollHeight - below;
  }

  // The first lines go, in whole blocks: the rest is owed, and goes later.
  dropFirst(num) {
    this.owed += num;
    while (this.blocks.length && this.blocks[0].lines.length <= this.owed) {
      const { lines, holder } = this.blocks.shift();
      this.owed -= lines.length;
      this.watch.unobserve(holder);
      holder.remove();
    }
  }

  toEnd() {
    for (const block of this.blocks.slice(-2)) this.fill(block);
    this.box.scrollTop = this.box.scrollHeight;
  }

  // Scrolls to a line; false: it is not in the list.
  reveal(line) {
    const block = this.blocks.find(({ lines }) => lines.includes(line));
    if (!block) return false;
    this.fill(block);
    block.holder.children[block.lines.indexOf(line)].scrollIntoView({ block: "center" });
    return true;
  }

  blocksOf(lines) {
    const made = [];
    for (let at = 0; at < lines.length; at += BLOCK) {
      const block = { lines: lines.slice(at, at + BLOCK), holder: document.createElement("div"), isFilled: false };
      this.estimate(block);
      this.of.set(block.holder, block);
      this.watch.observe(block.holder);
      made.push(block);
    }
    return made;
  }

  estimate(block) {
    block.holder.style.height = `${block.lines.length * LINE_PX}px`;
  }

  fill(block) {
    if (block.isFilled) return;
    block.isFilled = true;
    block.holder.replaceChildren(...block.lines.map(this.made));
    block.holder.style.height = "";
  }

  empty(block) {
    if (!block.isFilled) return;
    block.isFilled = false;
    block.holder.style.height = `${block.holder.offsetHeight}px`;
    block.holder.replaceChildren();
  }
}
