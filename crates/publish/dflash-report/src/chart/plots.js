"use strict";
// Shows the values under the pointer, or at a cursor that the arrow keys move.
const plots = (() => {
  const lines = (svg) => [...svg.querySelectorAll(".line")].map((line) => ({
    name: line.dataset.name,
    points: line.dataset.values.split(" ").map((point) => {
      const [at, text, y] = point.split(",");
      return { at: Number(at), text, y: Number(y) };
    }),
  }));
  const places = (svg) => {
    const all = lines(svg).flatMap((line) => line.points.map((point) => point.at));
    return [...new Set(all)].sort((a, b) => a - b);
  };
  const nearest = (all, at) => all.reduce((best, one) => (Math.abs(one - at) < Math.abs(best - at) ? one : best), all[0]);
  const scale = (svg) => ["from", "to", "left", "right"].map((key) => Number(svg.dataset[key]));
  const value = (svg) => svg.closest("figure").querySelector(".value");

  function show(svg, at) {
    const [from, to, left, right] = scale(svg);
    const x = left + ((at - from) / (to - from)) * (right - left);
    const cursor = svg.querySelector(".cursor");
    cursor.setAttribute("transform", `translate(${x} 0)`);
    cursor.classList.add("on");
    svg.dataset.at = at;
    const found = lines(svg).flatMap((line) => {
      const point = line.points.find((point) => point.at === at);
      return point ? [`${line.name} ${point.text}`] : [];
    });
    value(svg).textContent = `${svg.dataset.axis} ${Number(at.toPrecision(6))}: ${found.join(", ")}`;
  }
  function hide(svg) {
    svg.querySelector(".cursor").classList.remove("on");
    delete svg.dataset.at;
    value(svg).textContent = svg.querySelector("desc").textContent;
  }
  const plot = (event) => event.target.closest && event.target.closest("svg.plot");

  document.addEventListener("pointermove", (event) => {
    const svg = plot(event);
    document.querySelectorAll("svg.plot[data-at]").forEach((other) => {
      if (other !== svg && other !== document.activeElement) hide(other);
    });
    if (!svg) return;
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    const [from, to, left, right] = scale(svg);
    show(svg, nearest(places(svg), from + ((x - left) / (right - left)) * (to - from)));
  });
  document.addEventListener("keydown", (event) => {
    const svg = plot(event);
    if (!svg) return;
    const all = places(svg);
    const now = svg.dataset.at === undefined ? all.length : all.indexOf(Number(svg.dataset.at));
    const next = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: all.length - 1 }[event.key];
    if (event.key === "Escape") hide(svg);
    if (next === undefined) return;
    event.preventDefault();
    show(svg, all[Math.max(0, Math.min(all.length - 1, next))]);
  });
  document.addEventListener("focusout", (event) => {
    if (plot(event)) hide(plot(event));
  });
  return { show };
})();
