# The pages as a book: links lead somewhere, every error has its row and its test, and the reference builds without a warning.
foreach(checker IN ITEMS links errors)
  add_test(NAME docs/${checker} COMMAND Python3::Interpreter "${CMAKE_CURRENT_LIST_DIR}/${checker}.py" "${PROJECT_SOURCE_DIR}")
  add_test(NAME docs/${checker}_checker COMMAND Python3::Interpreter "${CMAKE_CURRENT_LIST_DIR}/${checker}.py" --self-test)
  ddp_test_properties(docs/${checker} LABELS docs)
  ddp_test_properties(docs/${checker}_checker LABELS docs)
endforeach()
add_test(NAME docs/reference COMMAND bash "${PROJECT_SOURCE_DIR}/scripts/reference.sh" "${PROJECT_BINARY_DIR}/reference")
ddp_test_properties(docs/reference TIMEOUT 300 LABELS docs)
