
// Keeps the page current: asks its server every two seconds, and replaces the parts that changed.
(() => {
  const link = document.getElementById("link");
  let tag = null;
  let lostAt = null;
  const known = new Map();

  function replace(id, html) {
    const part = document.getElementById(id);
    if (!part || known.get(id) === html) return;
    known.set(id, html);
    const unfolded = [...part.querySelectorAll("details")].map((one) => one.open);
    const focused = part.contains(document.activeElement) && document.activeElement.getAttribute("aria-label");
    const cursors = [...part.querySelectorAll("svg.plot[data-at]")].map((svg) => [svg.getAttribute("aria-label"), Number(svg.dataset.at)]);
    part.innerHTML = html;
    [...part.querySelectorAll("details")].forEach((one, index) => { one.open = unfolded[index] || false; });
    const named = (name) => [...part.querySelectorAll("[aria-label]")].find((one) => one.getAttribute("aria-label") === name);
    if (focused && named(focused)) named(focused).focus();
    cursors.forEach(([name, at]) => { if (named(name)) plots.show(named(name), at); });
  }

  async function ask() {
    const headers = tag ? { "If-None-Match": tag } : {};
    const reply = await fetch("state.json", { headers, cache: "no-store" });
    if (reply.status === 304) return;
    if (!reply.ok) throw new Error(`the server answers ${reply.status}`);
    const state = await reply.json();
    tag = reply.headers.get("ETag");
    document.title = state.title;
    for (const [id, html] of Object.entries(state.parts)) replace(id, html);
  }

  function tell(text, isLost) {
    if (link.textContent !== text) link.textContent = text;
    link.className = isLost ? "alert fault" : "muted";
  }

  async function keep() {
    try {
      await ask();
      lostAt = null;
      tell("This page keeps itself current.", false);
    } catch {
      lostAt = lostAt || new Date().toLocaleTimeString();
      tell(`No answer from dflash report since ${lostAt}: what is shown is older. Trying again.`, true);
    }
    setTimeout(keep, document.hidden ? 10000 : 2000);
  }
  document.addEventListener("visibilitychange", () => { if (!document.hidden) ask().catch(() => {}); });
  keep();
})();
