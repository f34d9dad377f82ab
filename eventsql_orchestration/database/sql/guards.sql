-- has_guard_function -- Whether the function of that trigger exists.
SELECT to_regprocedure(%(name)s) IS NOT NULL;
