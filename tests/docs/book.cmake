# The pages as a book: links lead somewhere, every error has its row and its test, and the reference builds without a warning.
foreach(checker IN ITEMS links errors)
  add_test(NAME docs/${checker} COMMAND Python3::Interpreter "${CMAKE_CURRENT_LIST_DIR}/${checker}.py" "${PROJECT_SOURCE_DIR}")
  add_test(NAME docs/${checker}_checker COMMAND Python3::Interpreter "${CMAKE_CURRENT_LIST_DIR}/${checker}.py" --self-test)
  ddp_test_properties(docs/${checker} LABELS docs)
  ddp_test_properties(docs/${checker}_checker LABELS docs)
endforeach()
add_test(NAME docs/reference COMMAND bash "${PROJECT_SOURCE_DIR}/scripts/reference.sh" "${PROJECT_BINARY_DIR}/reference")
ddp_test_properties(docs/reference TIMEOUT 300 LABELS docs)
# The manual's reference pages: what the headers say now, and every public name on one of them.
add_test(NAME docs/reference_pages COMMAND Python3::Interpreter "${PROJECT_SOURCE_DIR}/scripts/reference_pages.py" --check)
add_test(NAME docs/reference_pages_checker
         COMMAND Python3::Interpreter "${PROJECT_SOURCE_DIR}/scripts/reference_pages.py" --self-test)
ddp_test_properties(docs/reference_pages TIMEOUT 300 LABELS docs)
ddp_test_properties(docs/reference_pages_checker LABELS docs)
