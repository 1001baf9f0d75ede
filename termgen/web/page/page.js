"use strict";

addEventListener("DOMContentLoaded", () => {
  document.getElementById("again").addEventListener("click", () => location.reload());
  const observer = new MutationObserver(() => {
    if (document.body.classList.contains("-loaded")) {
      observer.disconnect();
      document.querySelector(".xterm-helper-textarea").focus();
    }
  });
  observer.observe(document.body, { attributes: true, attributeFilter: ["class"] });
  // xterm.js measures a cell before the font has come, and does not measure again.
  document.fonts.load("16px 'Roboto Mono'").then(() => dispatchEvent(new Event("resize")));
});
