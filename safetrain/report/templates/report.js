"use strict";
(() => {
  const root = document.documentElement, toggle = document.getElementById("theme");
  const remembered = () => { try { return localStorage.getItem("safetrain-theme"); } catch { return null; } };
  const show = (theme) => { if (theme === "light" || theme === "dark") root.dataset.theme = theme; };
  show(remembered());
  toggle.hidden = false;
  toggle.addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    show(dark ? "light" : "dark");
    try { localStorage.setItem("safetrain-theme", root.dataset.theme); } catch { /* a page from disk may not */ }
  });
  for (const button of document.querySelectorAll("button.copy")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      const code = button.parentElement.querySelector("code");
      let done = true;
      try { await navigator.clipboard.writeText(code.textContent); }
      catch {
        const range = document.createRange();
        range.selectNodeContents(code);
        getSelection().removeAllRanges();
        getSelection().addRange(range);
        done = document.execCommand("copy");
      }
      button.textContent = done ? "Copied" : "Press Ctrl+C";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
  }
})();
