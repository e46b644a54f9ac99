"""The page's style: readable on a phone, in the dark, on paper, and by keyboard."""

STYLE = """
:root { color-scheme: light dark; --text: #1a1a1a; --soft: #454545; --line: #767676; --faint: #e3e3e3; --back: #ffffff;
  --link: #0b57a4; --mark: #8a3300; --head: #f1f1f1; }
@media (prefers-color-scheme: dark) { :root { --text: #ededed; --soft: #c4c4c4; --line: #9a9a9a; --faint: #3a3a3a;
  --back: #161616; --link: #8ab8f0; --mark: #ffb38a; --head: #262626; } }
* { box-sizing: border-box; }
html { font: 100%/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); }
body { margin: 0 auto; max-width: 78rem; padding: 0 1rem 3rem; overflow-wrap: break-word; }
h1, h2, h3 { line-height: 1.25; margin: 2rem 0 .6rem; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.35rem; border-bottom: 1px solid var(--line); } h3 { font-size: 1.1rem; }
p, li, dd { max-width: 48rem; }
a { color: var(--link); }
:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; }
.skip { position: absolute; left: -200rem; }
.skip:focus { left: 1rem; top: .5rem; background: var(--back); padding: .3rem; }
.lead { font-size: 1.1rem; } .soft, figcaption, caption { color: var(--soft); }
nav ul { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; margin: .5rem 0; }
nav a, summary { display: inline-block; padding: .2rem 0; }
.scroll { overflow-x: auto; margin: .6rem 0; }
table { border-collapse: collapse; font-size: .92rem; }
caption { text-align: left; padding: .2rem 0; }
th, td { padding: .25rem .7rem .25rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--faint); }
thead th { border-bottom: 2px solid var(--line); background: var(--head); vertical-align: bottom; }
tbody th { font-weight: 600; } th:first-child, td:first-child { padding-left: .3rem; }
th[scope="row"] { min-width: 8rem; }
.number { text-align: right; font-variant-numeric: tabular-nums; } td.number { white-space: nowrap; }
.bad { color: var(--mark); font-weight: 700; }
figure { margin: 1rem 0 2rem; }
figure img { display: block; max-width: 100%; height: auto; background: #fff; border: 1px solid var(--faint); }
figcaption { font-size: .92rem; max-width: 48rem; }
summary { cursor: pointer; color: var(--link); }
dl { display: grid; grid-template-columns: minmax(9rem, max-content) 1fr; gap: .2rem 1.2rem; }
dt { font-weight: 600; } dd { margin: 0; min-width: 0; }
@media (max-width: 30rem) { dl { display: block; } dd { margin-bottom: .6rem; } h1 { font-size: 1.35rem; } }
@media print { :root { --text: #000; --soft: #333; --back: #fff; --head: #eee; --faint: #ccc; }
  nav, .skip { display: none; } .scroll { overflow: visible; } figure, tr { break-inside: avoid; }
  h2, h3 { break-after: avoid; } figure img { min-width: 0 !important; } table { font-size: .72rem; } }
"""
