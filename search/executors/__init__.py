"""Where trials run: processes of this machine, or Ray. Work is named by a string, `module:function`."""
