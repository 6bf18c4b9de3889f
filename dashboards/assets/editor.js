/* The text of a study in the browser: line numbers, colours, indentation, and what may stand at the cursor. */
(() => {
  const escape = text => text.replace(/[&<>]/g, sign => ({ '&': '&amp;', '<': '&lt;', '>': '&gt;' })[sign]);

  /* A line in colours: a comment, the keys, quoted texts. */
  const PART = /((?:^|\s)#.*$)|("(?:[^"\\]|\\.)*"|'[^']*')|([\w.*+-]+(?: [\w.*+-]+)*)(?=\s*:(?:\s|$))/g;
  const coloured = line => {
    let shown = '', from = 0;
    for (const found of line.matchAll(PART)) {
      const kind = found[1] !== undefined ? 'c' : found[2] !== undefined ? 's' : 'k';
      shown += escape(line.slice(from, found.index)) + `<i class="${kind}">${escape(found[0])}</i>`;
      from = found.index + found[0].length;
    }
    return shown + escape(line.slice(from));
  };

  const attach = box => {
    const area = box.querySelector('textarea'), behind = box.querySelector('.code-lines');
    const list = document.createElement('div');
    list.className = 'completions';
    list.setAttribute('role', 'listbox');
    list.id = 'write-list';
    list.hidden = true;
    box.appendChild(list);
    area.setAttribute('spellcheck', 'false');
    area.setAttribute('wrap', 'off');
    area.setAttribute('aria-autocomplete', 'list');
    area.setAttribute('aria-controls', list.id);
    let words = [], start = 0, chosen = 0, asked = 0;

    /* What is typed and not saved is kept by the browser, by the address of the page, until it is saved or dropped. */
    const key = `archlab-draft:${location.pathname}${location.search}`, opened = area.value;
    const openedAs = document.getElementById('write-opened');
    const name = document.getElementById('write-file'), draft = document.querySelector('.draft');
    const keep = () => {
      if (area.value === opened) localStorage.removeItem(key);
      else localStorage.setItem(key, JSON.stringify({ text: area.value, file: name.value, before: openedAs.textContent }));
    };
    const restore = () => {
      const kept = JSON.parse(localStorage.getItem(key) || 'null');
      if (!kept || kept.text === opened) return;
      window.dash_clientside.set_props('write-text', { value: kept.text });
      window.dash_clientside.set_props('write-file', { value: kept.file });
      openedAs.textContent = kept.before; // saving refuses what has changed since the draft was begun
      window.dash_clientside.set_props('write-before', { data: JSON.parse(kept.before || '{}') });
      draft.hidden = false;
    };
    draft.querySelector('button').addEventListener('click', () => {
      localStorage.removeItem(key);
      location.reload();
    });

    const marked = () => new Set((document.getElementById('write-marks')?.textContent || '').split(','));
    const draw = () => {
      const wrong = marked();
      behind.innerHTML = area.value.split('\n')
        .map((line, at) => `<span${wrong.has(String(at + 1)) ? ' class="wrong"' : ''}>${coloured(line) || ' '}</span>`).join('');
      follow();
    };
    const follow = () => {
      behind.scrollTop = area.scrollTop;
      behind.scrollLeft = area.scrollLeft;
    };
    const hide = () => {
      list.hidden = true;
      area.removeAttribute('aria-activedescendant');
    };

    /* Replaces a part of the text as typing would, so that Ctrl+Z takes it back. */
    const put = (from, to, text) => {
      area.focus();
      area.setSelectionRange(from, to);
      document.execCommand('insertText', false, text);
    };
    const take = at => {
      const [word, , then] = words[at];
      const rest = area.value.slice(area.selectionEnd).split('\n')[0];
      const cut = /^[\w.*+-]*/.exec(rest)[0].length;
      put(start, area.selectionEnd + cut, word + (rest.slice(cut).trimStart().startsWith(':') ? '' : then));
      hide();
    };
    const show = () => {
      list.hidden = words.length === 0;
      if (list.hidden) return hide();
      list.innerHTML = words.map(([word, doc], at) =>
        `<div role="option" id="word-${at}" aria-selected="${at === chosen}"><b>${escape(word)}</b> <span>${escape(doc)}</span></div>`).join('');
      const before = area.value.slice(0, start).split('\n'), style = getComputedStyle(area);
      const letter = measure(style), high = parseFloat(style.lineHeight);
      const left = parseFloat(style.paddingLeft) + before[before.length - 1].length * letter - area.scrollLeft;
      list.style.left = `${Math.max(0, Math.min(left, box.clientWidth - 340))}px`;
      list.style.top = `${parseFloat(style.paddingTop) + before.length * high - area.scrollTop + 2}px`;
      list.children[chosen]?.scrollIntoView({ block: 'nearest' });
      area.setAttribute('aria-activedescendant', `word-${chosen}`);
    };
    const measure = style => {
      const canvas = document.createElement('canvas').getContext('2d');
      canvas.font = style.font;
      return canvas.measureText('m').width;
    };
    const complete = async always => {
      const mine = ++asked, position = area.selectionEnd;
      const answer = await fetch('/write/complete', {
        method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify({ text: area.value, position }),
      });
      if (!answer.ok || mine !== asked || area.selectionEnd !== position) return;
      const found = await answer.json(), typed = area.value.slice(found.start, position);
      start = found.start;
      words = !typed && !always ? [] : found.words;
      if (!always && words.length === 1 && words[0][0] === typed) words = [];
      chosen = 0;
      show();
    };

    area.addEventListener('scroll', () => { follow(); hide(); });
    area.addEventListener('blur', () => setTimeout(hide, 150));
    /* What is offered while the next answer is on its way: of the list that is there, what still fits. */
    const narrow = () => {
      const typed = area.value.slice(start, area.selectionEnd).toLowerCase();
      words = words.filter(([word]) => word.toLowerCase().includes(typed));
      chosen = 0;
      show();
    };

    area.addEventListener('input', event => {
      keep();
      draw();
      if (!list.hidden) narrow();
      if (event.inputType === 'insertText' && event.data && /[\w.]/.test(event.data)) complete(false);
      else if (!list.hidden) complete(true);
    });
    area.addEventListener('keydown', event => {
      if (event.key === ' ' && event.ctrlKey) {
        event.preventDefault();
        return complete(true);
      }
      if (!list.hidden) {
        const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
        if (step) {
          event.preventDefault();
          chosen = (chosen + step + words.length) % words.length;
          return show();
        }
        if (event.key === 'Enter' && words[chosen][0] === area.value.slice(start, area.selectionEnd)) hide();
        else if (event.key === 'Enter' || event.key === 'Tab') {
          event.preventDefault();
          return take(chosen);
        }
        if (event.key === 'Escape') {
          event.preventDefault();
          return hide();
        }
      }
      if (event.key === 'Enter' && !event.shiftKey && !event.ctrlKey) {
        const line = area.value.slice(0, area.selectionStart).split('\n').pop();
        const deeper = /:\s*(#.*)?$/.test(line) ? '  ' : '';
        event.preventDefault();
        put(area.selectionStart, area.selectionEnd, '\n' + /^ */.exec(line)[0] + deeper);
      }
    });
    list.addEventListener('mousedown', event => {
      const option = event.target.closest('[role=option]');
      event.preventDefault();
      if (option) take([...list.children].indexOf(option));
    });
    const changes = { childList: true, characterData: true, subtree: true };
    new MutationObserver(draw).observe(document.getElementById('write-marks'), changes);
    const said = document.getElementById('write-said');
    new MutationObserver(() => {
      if (!/^(Saved|Running)/.test(said.textContent)) return;
      localStorage.removeItem(key);
      draft.hidden = true;
    }).observe(said, changes);
    draw();
    restore();
  };

  /* A problem leads to its line. */
  document.addEventListener('click', event => {
    const to = event.target.closest?.('.to-line');
    const area = document.querySelector('.code textarea');
    if (!to || !area) return;
    const lines = area.value.split('\n').slice(0, to.dataset.line - 1);
    const at = lines.join('\n').length + (lines.length ? 1 : 0) + Number(to.dataset.column) - 1;
    area.focus();
    area.setSelectionRange(at, at);
    area.scrollTop = Math.max(0, (to.dataset.line - 6) * parseFloat(getComputedStyle(area).lineHeight));
  });

  new MutationObserver(() => {
    const box = document.querySelector('.code');
    if (box && !box.dataset.attached && box.querySelector('textarea') && document.getElementById('write-marks')) {
      box.dataset.attached = 'yes';
      attach(box);
    }
  }).observe(document.documentElement, { childList: true, subtree: true });
})();
