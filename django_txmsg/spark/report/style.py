"""The report's style sheet and its one script. Nothing is fetched from anywhere."""

from __future__ import annotations

_LIGHT = """--back:#f6f7f9;--card:#fff;--text:#1c2330;--soft:#5d6878;--rule:#e3e7ed;
--blue:#2f6fdb;--green:#1a8f5f;--orange:#d1761b;--violet:#7b55c7;--red:#c4314b;
color-scheme:light"""
_DARK = """--back:#12161d;--card:#1b212b;--text:#e6eaf0;--soft:#98a4b5;--rule:#2c3542;
--blue:#6ca4ff;--green:#4cc38a;--orange:#f0a04b;--violet:#b295f0;--red:#ff7a8e;
color-scheme:dark"""

STYLE = (
    f":root{{{_LIGHT}}}"
    f"@media(prefers-color-scheme:dark){{:root{{{_DARK}}}}}"
    f':root[data-theme="light"]{{{_LIGHT}}}:root[data-theme="dark"]{{{_DARK}}}'
    """
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--text);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
header,main,footer{max-width:1000px;margin:0 auto;padding:0 20px}
header{display:flex;justify-content:space-between;align-items:start;padding-top:28px}
h1{font-size:24px;margin:0;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:17px;margin:0}
p{margin:2px 0 12px;color:var(--soft)}
button{background:var(--card);color:var(--soft);border:1px solid var(--rule);
border-radius:8px;padding:6px 12px;font:inherit;font-size:13px;cursor:pointer}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));gap:12px;
margin:18px 0}
.tile,section{background:var(--card);border:1px solid var(--rule);border-radius:12px}
.tile{padding:14px 16px}
.tile b{display:block;font-size:25px;font-weight:650;line-height:1.2;
font-variant-numeric:tabular-nums}
.tile span{color:var(--soft);font-size:13px}
.tile.bad b{color:var(--red)}.tile.good b{color:var(--green)}
.told{margin:0 0 18px;padding:0 0 0 20px;color:var(--soft)}
.told b,.told q{color:var(--text);font-weight:600}.told li{margin:3px 0}
.told q{overflow-wrap:anywhere}
section{padding:18px 20px;margin:0 0 16px;overflow-x:auto}
svg{width:100%;height:auto;display:block}
.grid{stroke:var(--rule);stroke-width:1}
.tick{fill:var(--soft);font-size:12px}
.line{fill:none;stroke-width:2;stroke-linejoin:round}
.area{opacity:.14}
.hover{fill:transparent}.hover:hover{fill:var(--soft);opacity:.12}
.keys{display:flex;flex-wrap:wrap;gap:16px;font-size:13px;color:var(--soft);
margin-bottom:6px}
.key i{display:inline-block;width:18px;height:3px;border-radius:2px;margin-right:6px;
vertical-align:middle}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{text-align:left;padding:8px 10px 8px 0;border-top:1px solid var(--rule);
vertical-align:top;font-weight:400}
thead th{border-top:0;color:var(--soft);font-size:13px}
tbody th{overflow-wrap:anywhere;max-width:420px}
small{color:var(--soft)}
thead th{white-space:nowrap}
.n{font-variant-numeric:tabular-nums;white-space:nowrap}
.bars th{width:38%}.bars .bar{width:44%;vertical-align:middle}
.bars i{display:block;height:12px;border-radius:3px;min-width:2px}
.spread{display:block;position:relative;width:150px;height:18px}
.spread i{position:absolute;border-radius:3px}
.spread .far{top:7px;height:4px;background:var(--orange)}
.spread .near{top:4px;height:10px;background:var(--blue);min-width:3px}
.spark{width:120px;height:24px}.spark rect{fill:var(--red)}
.none{color:var(--soft);margin:6px 0}
footer{color:var(--soft);font-size:13px;padding-bottom:32px}
svg.phone{display:none}
@media(max-width:640px){svg.phone{display:block}svg.desk{display:none}
header,main,footer{padding-left:12px;padding-right:12px}section{padding:14px}
.tiles{grid-template-columns:1fr 1fr}.tile b{font-size:22px}
tbody th{min-width:130px}.bars th{width:45%}.bars .bar{width:25%}}
@media print{button{display:none}section{break-inside:avoid}}
"""
)

SCRIPT = """
document.getElementById("theme").addEventListener("click", function () {
  var root = document.documentElement;
  var dark = root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
"""
