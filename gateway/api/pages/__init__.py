"""The page: HTML at `/`, beside the API, for people with a browser.

`routing` has the router, the form tokens and `PageDep`. `templates` renders and serves static
files. `sign_in` gives browsers a session. `live` streams changes to open pages. `charts` draws SVG,
and `boards` groups the curves of runs. Each other module belongs to one page.

To add a page:

1. Write a template in `templates/` that extends `base.html` and fills the blocks `title` and
   `main`. Values are escaped. Inline styles and scripts do not work, because of the content
   security policy. Numbers and times have macros in `parts.html`.
2. Write a module with `router = PageRouter()` and operations:

       @router.operation("GET", "/devices", role="reader")
       async def devices_page(page: PageDep) -> Response:
           groups = page.gateway.groups()  # check what `page.caller` may see
           return page.render("devices.html", groups=groups)

   Raise a `TandemError` for a refusal. A browser gets it as a page, others as JSON.
3. A form has the method `post` and the hidden field `form_token`, with the value `form_token` that
   each template gets. Its operation is a `POST` with an audit action and `raw=FORM_CONTENT`. It
   reads the form by `read_form(request)`.
4. Put scripts into `static/`, and load them with `<script src="{{ static('x.js') }}" defer>`.
   A page must be readable without them.
5. Add the router to `ROUTERS` (`gateway/app.py`), the page to the navigation in `base.html`, and
   rows to the access table (`tests/support/gateway/access_world.py`)."""
