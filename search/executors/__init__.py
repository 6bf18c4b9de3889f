"""Where trials run: processes of this machine, or Ray. Work is named by a string, `module:function`.

Its door: `executor`, `inline`, `ray_executor`, `resources`, `process_group`.
"""
