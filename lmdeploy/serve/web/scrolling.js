const NEAR_END = 40; // pixels: so close to the end, the view follows the answer

/** Keep the end of `content` in view until the user scrolls up. Return a function that scrolls there. */
export function followEnd(scroller, content) {
  let last = 0;
  let follows = true;
  scroller.addEventListener("scroll", () => {
    const rest = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight;
    follows = rest < NEAR_END || (follows && scroller.scrollTop >= last);
    last = scroller.scrollTop;
  });
  const toEnd = () => {
    follows = true;
    scroller.scrollTop = scroller.scrollHeight;
  };
  const observer = new ResizeObserver(() => follows && toEnd());
  observer.observe(content);
  observer.observe(scroller);
  return toEnd;
}
